"""What a client knows of subjects, placements and routes, and the calls to metaservers."""
