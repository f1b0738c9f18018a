"""What exists: model presets, devices and dtypes as literal tables. Imports no torch."""
