"""Tools: the forms of their calls, and how calls are forced, read and answered."""
