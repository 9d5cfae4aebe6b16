"""The drafter of Flash-Next: one more layer that reads the last hidden state and the token after it."""
