"""Tools: how they are asked for, told to the model, and how its calls are forced and read."""
