"""Real servers on loopback, for tests and for the demo by URL alone: SeaweedFS, PostgreSQL, MLflow.

python -m tests.servers -- infoxlm run configs/demo.yaml --store s3://infoxlm/store
"""
