"""Print the Secrets that the manifests refer to, with new random passwords and keys, as a Kubernetes list in JSON.

    python k8s/make_secrets.py small | kubectl create -f -

`kubectl create` does not change Secrets that exist. Some Secrets share a password, so to change one, first delete all
Secrets of the overlay. The overlay `production` uses a database of your own, whose password the script asks for:

    python k8s/make_secrets.py production --database-user mlflow | kubectl create -f -

If runs are in another namespace than MLflow and S3, `--runs-in kubeflow` adds the Secrets of runs to that namespace.
"""

import argparse
import getpass
import json
import secrets
import sys

NAMESPACE = "infoxlm"
TRAINING_USER = "trainings"
"""MLflow user of steps and Ray pods."""
REGISTRY_USER = "pipelines"
"""MLflow user of the steps that register and promote."""
SECRETS_OF_RUNS = ("infoxlm-store", "infoxlm-mlflow", "infoxlm-registry", "kfp-mlflow-credentials")
"""Secrets that steps, Ray pods and Kubeflow's driver read."""

SecretData = dict[str, str]
"""Key of a Secret -> value."""


def generate_password() -> str:
    """Return a random password."""
    return secrets.token_urlsafe(24)


def generate_s3_keys(prefix: str) -> SecretData:
    """Return a random pair of S3 keys. The prefix says whose keys they are."""
    return {"AWS_ACCESS_KEY_ID": f"{prefix}-{secrets.token_hex(6)}", "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30)}


def generate_mlflow_secrets(database: SecretData) -> dict[str, SecretData]:
    """Return the Secrets of the MLflow server, its database and its two users."""
    training_password = generate_password()
    return {
        "mlflow-server": {"flask-secret-key": secrets.token_hex(32), "admin-password": generate_password()},
        "mlflow-database": database,
        "infoxlm-mlflow": {"MLFLOW_TRACKING_USERNAME": TRAINING_USER, "MLFLOW_TRACKING_PASSWORD": training_password},
        # Kubeflow's MLflow plugin reads the same login under other keys.
        "kfp-mlflow-credentials": {"username": TRAINING_USER, "password": training_password},
        "infoxlm-registry": {
            "MLFLOW_TRACKING_USERNAME": REGISTRY_USER,
            "MLFLOW_TRACKING_PASSWORD": generate_password(),
        },
    }


def generate_seaweedfs_secrets() -> dict[str, SecretData]:
    """Return the keys of three S3 identities, and SeaweedFS's configuration with the permissions of each.

    The Job that creates the bucket is an administrator. Steps and Ray pods may use the bucket. MLflow may use only its
    own prefix in the bucket.
    """
    actions = ("Read", "Write", "List", "Tagging")
    permissions = {
        "seaweedfs-admin": ["Admin"],
        "infoxlm-store": [f"{action}:infoxlm" for action in actions],
        "mlflow-store": [f"{action}:infoxlm/mlflow/*" for action in actions],
    }
    keys = {
        "seaweedfs-admin": generate_s3_keys("admin"),
        "infoxlm-store": generate_s3_keys("store"),
        "mlflow-store": generate_s3_keys("mlflow"),
    }
    identities = []
    for name, key_pair in keys.items():
        credentials = {"accessKey": key_pair["AWS_ACCESS_KEY_ID"], "secretKey": key_pair["AWS_SECRET_ACCESS_KEY"]}
        identities.append({"name": name, "credentials": [credentials], "actions": permissions[name]})
    return {**keys, "seaweedfs": {"s3.json": json.dumps({"identities": identities}, indent=1)}}


def make_manifest(name: str, data: SecretData, namespace: str = NAMESPACE) -> dict:
    """Return the manifest of a Secret."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "infoxlm"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def main() -> None:
    """Print the Secrets of the overlay that the command line names."""
    parser = argparse.ArgumentParser(description="Print the Secrets of an overlay. Pipe them into kubectl create -f -")
    parser.add_argument("overlay", choices=["small", "production"])
    parser.add_argument("--database-user", help="user of your own database; the script asks for the password")
    parser.add_argument(
        "--runs-in", default=NAMESPACE, metavar="NAMESPACE", help="namespace of the runs (default: %(default)s)"
    )
    options = parser.parse_args()
    if sys.stdout.isatty():  # a terminal may keep what it shows
        sys.exit("The output contains passwords, so it is not printed on a terminal. Pipe it into kubectl create -f -")
    if (options.overlay == "production") != bool(options.database_user):
        sys.exit("Give --database-user with the overlay production, which uses your own database, and only with it.")
    if options.database_user:
        # Not an option, because other users can see the arguments of a process.
        password = getpass.getpass(f"password of the database user {options.database_user}: ")
        database = {"username": options.database_user, "password": password}
    else:
        database = {"username": "mlflow", "password": generate_password()}
    secrets_by_name = generate_mlflow_secrets(database)
    if options.overlay == "small":
        secrets_by_name |= generate_seaweedfs_secrets()
    manifests = [make_manifest(name, data) for name, data in secrets_by_name.items()]
    if options.runs_in != NAMESPACE:  # a pod can read only the Secrets of its own namespace
        for name in SECRETS_OF_RUNS:
            if name in secrets_by_name:
                manifests.append(make_manifest(name, secrets_by_name[name], options.runs_in))
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))


if __name__ == "__main__":
    main()
