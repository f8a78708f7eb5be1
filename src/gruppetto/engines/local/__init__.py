"""Real processes on one machine: a server, learners, and weights and gradients in shared memory.

    supervisor (the caller's process)         progress, signals, restarts
        |  fork server (has imported torch; shared by all runs of the caller)
        |      template (one per run: has loaded the task)
        |          server        the loop, the coordinator, the trace
        |          learner 0..P-1, each with a loader process for a user's own dataset
        |          evaluator     where evaluation is live

A socket pair carries a few numbers per gradient between the server and each learner; weights and
gradients lie in one anonymous file that all of them map, so nothing is pickled on a gradient's way
and nothing is left behind however the processes end.
"""
