"""`firesteel tune`: tiles by measurement."""
