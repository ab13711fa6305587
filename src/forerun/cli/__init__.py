"""The command line.

`program` is the process, and runs `app`, which has the commands and shows errors. Each command has a file of its name, and
its options lie there or beside it; what several of them share has a file named after what it is: how commands are made
(`command`, `help_screen`), what is given (`options`, `whole_numbers`, `input_files`), models (`loading`, `pulling`,
`torch_libraries`), what is shown (`console`, `answer`, `speculation_figures`), Ctrl-C (`interruption`).
"""
