"""Hosts: each translates its own names to firesteel's; none holds policy."""
