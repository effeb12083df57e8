"""`firesteel bench`: measurements, one module each."""
