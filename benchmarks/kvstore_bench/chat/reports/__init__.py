"""What a run of chat measured: numbers, tables, pictures, comparisons."""
