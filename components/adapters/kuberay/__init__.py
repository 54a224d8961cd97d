"""KubeRay: create a RayJob, follow it to its end, and delete it."""
