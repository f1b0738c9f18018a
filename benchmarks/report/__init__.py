"""Tables, plots and the self-contained page, made from records."""
