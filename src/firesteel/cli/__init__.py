"""The command `firesteel`."""
