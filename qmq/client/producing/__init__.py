"""Producers: open batches, the sender of each broker group, receipts, delayed messages."""
