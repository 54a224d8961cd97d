"""`k8s/render.sh` sets images by digest, and prints nothing while an image is still a placeholder."""

import os
import shutil
import subprocess

import pytest
import yaml

from tests.k8s.manifests import K8S, KUBECTL, OVERLAYS, ROOT, SINGLE_USER, containers_of

IMAGE = f"registry.example.org:5000/team/infoxlm@sha256:{'ab' * 32}"


def run_script(*arguments: str, k8s=K8S) -> subprocess.CompletedProcess:
    environment = os.environ | {"KUBECTL": KUBECTL}
    return subprocess.run([str(k8s / "render.sh"), *arguments], capture_output=True, text=True, env=environment)


def test_every_container_of_production_has_the_given_image():
    result = run_script("production", IMAGE)

    assert result.returncode == 0, result.stderr
    images = []
    for item in yaml.safe_load_all(result.stdout):
        if "template" in item.get("spec", {}):
            images += [container["image"] for container in containers_of(item["spec"]["template"]["spec"])]
    assert len(images) >= 3
    assert set(images) == {IMAGE}
    assert not list(K8S.glob(".render-*"))


def test_placeholders_of_third_party_images_are_refused_until_they_are_set(tmp_path):
    copied_k8s = shutil.copytree(K8S, tmp_path / "k8s")
    refused = run_script("small", IMAGE, k8s=copied_k8s)

    assert refused.returncode == 2
    assert "postgres" in refused.stderr
    assert "placeholders" in refused.stderr
    kustomization = copied_k8s / "overlays/small/kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("sha256:" + "0" * 64, "sha256:" + "cd" * 32))
    accepted = run_script("small", IMAGE, k8s=copied_k8s)
    assert accepted.returncode == 0, accepted.stderr
    assert f"chrislusf/seaweedfs@sha256:{'cd' * 32}" in accepted.stdout


@pytest.mark.parametrize("overlay", ["small", SINGLE_USER])
def test_components_and_third_party_images_can_be_arguments(overlay):
    seaweedfs = f"chrislusf/seaweedfs@sha256:{'cd' * 32}"
    postgres_mirror = f"mirror.example:5000/pg@sha256:{'ef' * 32}"

    result = run_script(overlay, IMAGE, "downloads", "operator-elsewhere", seaweedfs, f"postgres={postgres_mirror}")

    assert result.returncode == 0, result.stderr
    names = {item["metadata"]["name"] for item in yaml.safe_load_all(result.stdout)}
    assert {"allow-steps-to-internet", "allow-operator"} <= names
    assert seaweedfs in result.stdout
    assert postgres_mirror in result.stdout
    assert "0" * 64 not in result.stdout


@pytest.mark.parametrize("argument", ["donwloads", "postgres:15", f"postgres@sha256:{'a' * 63}"])
def test_unknown_component_and_image_without_digest_are_refused(argument):
    refused = run_script("small", IMAGE, argument)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{argument}: neither a component (" in refused.stderr
    assert " downloads " in refused.stderr


@pytest.mark.parametrize("image", ["registry.example/infoxlm:latest", "infoxlm", f"infoxlm@sha256:{'a' * 63}"])
def test_our_image_without_digest_is_refused(image):
    refused = run_script("production", image)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "digest" in refused.stderr


def test_unknown_overlay_is_refused():
    refused = run_script("huge", IMAGE)

    assert refused.returncode == 2
    assert "no such overlay" in refused.stderr
    assert {*OVERLAYS, SINGLE_USER} == {path.name for path in (K8S / "overlays").iterdir()}


def test_deploy_overwrites_config_maps_that_the_profile_controller_has_created():
    """The controller creates kfp-launcher and artifact-repositories, so an apply without force would conflict."""
    recipe = (ROOT / "Makefile").read_text().partition("\ndeploy:")[2].partition("\n\n")[0]

    assert "apply --server-side --force-conflicts -f -" in recipe
