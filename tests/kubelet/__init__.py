"""A Kubernetes whose pods are local processes, for tests of the chart (docs/KUBERNETES.md)."""
