"""Copying tiles by index, from the device or from host memory."""
