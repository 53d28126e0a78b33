"""What a broker reads for others: browsing, searches, copies for replicas and stores."""
