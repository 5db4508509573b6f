"""Ways for parcels to travel between ranks."""
