"""Micro-steps of a run whose samples go together through weights that arrive block by block."""

from wandistiller.config.job import Job


def branches(job: Job) -> int:
    """Return the branches of classifier-free guidance in one call of the teacher: text and null, or text."""
    return 2 if {job.run.guidance_scale, job.run.guidance_scale_2} != {1} else 1


def swept(job: Job) -> int:
    """Return how many micro-steps' samples go through the teacher together."""
    sizes = (job.size, *job.buckets)
    samples = job.batch.micro * max(1, branches(job) // job.teacher.guidance_passes)
    tokens = max(job.folder.tokens(s.height, s.width, s.num_frames) for s in sizes)
    nbytes = samples * tokens * job.folder.config.width * job.teacher.engine.dtype.itemsize
    return job.teacher.sweep(job.batch.accumulation, nbytes)


def rolled_out(job: Job) -> int:
    """Return how many micro-steps' samples the student draws together, on the teacher's weights.

    They may be of several updates of a step, between which the student does not change. ZeRO-3 gathers
    adapters in the order of one call after the other.
    """
    if not job.networks.share_base or job.student_engine.stage == 3:
        return 1
    tokens = job.folder.tokens(job.size.height, job.size.width, job.size.num_frames)
    nbytes = job.batch.micro * tokens * job.folder.config.width * job.student_engine.dtype.itemsize
    return job.teacher.sweep(len(job.objective.updates) * job.batch.accumulation, nbytes)
