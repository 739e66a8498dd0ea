"""What every benchmark command shows and how it ends."""
