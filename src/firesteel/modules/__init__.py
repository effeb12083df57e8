"""Modules that hold packed weights and run them, whatever host has the model."""
