"""The vocabulary of forerun: data that every layer speaks, without behaviour."""
