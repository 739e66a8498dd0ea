"""What is asked: conversations made up, drawn as other tools draw them, or read from a file."""
