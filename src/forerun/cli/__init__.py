"""The command line: a file per command, and the options, files and output that several share."""
