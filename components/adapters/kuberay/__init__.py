"""KubeRay: a RayJob from its manifest to its end."""
