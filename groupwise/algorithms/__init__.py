"""The mathematics: pure functions on numbers and tensors, each testable on its own."""
