"""Make the Secrets that the manifests refer to, with fresh random values: into the cluster, into no file.

    python k8s/make_secrets.py small | kubectl create -f -

`create` leaves a Secret that exists as it is. To change them, delete all of an overlay first: some belong together.
The login of a database of your own is not made up: say it, and it is asked for the password.

    python k8s/make_secrets.py production --database-user mlflow | kubectl create -f -

Where runs are in another namespace than MLflow and S3, `--runs-in kubeflow` puts there, too, what steps read.
"""

import argparse
import getpass
import json
import secrets
import sys

NAMESPACE = "infoxlm"
TRAININGS, PIPELINES = "trainings", "pipelines"
"""The users of MLflow that steps and Ray pods are, and that the steps are which register and promote."""
OF_RUNS = ("infoxlm-store", "infoxlm-mlflow", "infoxlm-registry", "kfp-mlflow-credentials")
"""What steps, Ray pods and Kubeflow's driver read."""


def password() -> str:
    return secrets.token_urlsafe(24)


def keys(prefix: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": f"{prefix}-{secrets.token_hex(6)}", "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(30)}


def of_mlflow(database: dict[str, str]) -> dict[str, dict[str, str]]:
    """The server's own, its database's, the login of the steps in the two forms in which it is read, the registry's."""
    login = password()
    return {
        "mlflow-server": {"flask-secret-key": secrets.token_hex(32), "admin-password": password()},
        "mlflow-database": database,
        "infoxlm-mlflow": {"MLFLOW_TRACKING_USERNAME": TRAININGS, "MLFLOW_TRACKING_PASSWORD": login},
        "kfp-mlflow-credentials": {"username": TRAININGS, "password": login},
        "infoxlm-registry": {"MLFLOW_TRACKING_USERNAME": PIPELINES, "MLFLOW_TRACKING_PASSWORD": password()},
    }


def of_seaweedfs() -> dict[str, dict[str, str]]:
    """Three identities: who makes the bucket, the steps and Ray pods, MLflow with its own prefix only."""
    known = {"seaweedfs-admin": keys("admin"), "infoxlm-store": keys("store"), "mlflow-store": keys("mlflow")}
    prefix = "infoxlm/mlflow"
    may = {
        "seaweedfs-admin": ["Admin"],
        "infoxlm-store": [f"{action}:infoxlm" for action in ("Read", "Write", "List", "Tagging")],
        "mlflow-store": [f"{action}:{prefix}/*" for action in ("Read", "Write", "List", "Tagging")],
    }
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": own["AWS_ACCESS_KEY_ID"], "secretKey": own["AWS_SECRET_ACCESS_KEY"]}],
            "actions": may[name],
        }
        for name, own in known.items()
    ]
    return {**known, "seaweedfs": {"s3.json": json.dumps({"identities": identities}, indent=1)}}


def secret(name: str, data: dict[str, str], namespace: str = NAMESPACE) -> dict:
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "infoxlm"}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print the Secrets of an overlay, to be piped into kubectl create -f -"
    )
    parser.add_argument("overlay", choices=["small", "production"])
    parser.add_argument("--database-user", help="of a database of your own: the password is asked for")
    parser.add_argument("--runs-in", default=NAMESPACE, metavar="NAMESPACE", help=f"of the runs, if not {NAMESPACE}")
    given = parser.parse_args()
    if sys.stdout.isatty():
        sys.exit("passwords do not belong on a screen: pipe this into kubectl create -f -")
    if (given.overlay == "production") != bool(given.database_user):
        sys.exit("--database-user goes with production, whose database is your own")
    if given.database_user:
        database = {"username": given.database_user, "password": getpass.getpass("password of the database: ")}
    else:
        database = {"username": "mlflow", "password": password()}
    made = of_mlflow(database) | (of_seaweedfs() if given.overlay == "small" else {})
    items = [secret(name, data) for name, data in made.items()]
    if given.runs_in != NAMESPACE:
        items += [secret(name, made[name], given.runs_in) for name in OF_RUNS if name in made]
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


if __name__ == "__main__":
    main()
