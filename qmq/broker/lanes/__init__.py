"""Lanes of ordered groups: who holds them, what was finished, which keys are parked."""
