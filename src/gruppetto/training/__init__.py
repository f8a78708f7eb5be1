"""Training without processes and without a clock: task, learner, server, and their arithmetic."""
