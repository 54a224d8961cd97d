"""A release's image gets into the manifests by its digest; what is still a placeholder is not applied."""

import os
import shutil
import subprocess

import pytest
import yaml

from tests.k8s.manifests import K8S, KUBECTL, OVERLAYS, ROOT, SINGLE_USER

IMAGE = f"registry.example.org:5000/team/infoxlm@sha256:{'ab' * 32}"


def render(*arguments: str, scripts=K8S) -> subprocess.CompletedProcess:
    environment = os.environ | {"KUBECTL": KUBECTL}
    return subprocess.run([str(scripts / "render.sh"), *arguments], capture_output=True, text=True, env=environment)


def test_the_image_of_every_container_of_ours_is_the_one_that_was_given():
    printed = render("production", IMAGE)

    assert printed.returncode == 0, printed.stderr
    templates = [
        item["spec"]["template"]["spec"]
        for item in yaml.safe_load_all(printed.stdout)
        if "template" in str(item.get("spec"))
    ]
    images = [c["image"] for spec in templates for c in [*spec.get("initContainers", []), *spec["containers"]]]
    assert set(images) == {IMAGE} and len(images) >= 3
    assert not list(K8S.glob(".render-*"))


def test_digests_of_other_peoples_images_have_to_be_set_once(tmp_path):
    copy = shutil.copytree(K8S, tmp_path / "k8s")
    refused = render("small", IMAGE, scripts=copy)

    assert refused.returncode == 2 and "postgres" in refused.stderr and "placeholders" in refused.stderr
    overlay = copy / "overlays/small/kustomization.yaml"
    overlay.write_text(overlay.read_text().replace("sha256:" + "0" * 64, "sha256:" + "cd" * 32))
    printed = render("small", IMAGE, scripts=copy)
    assert printed.returncode == 0, printed.stderr
    assert f"chrislusf/seaweedfs@sha256:{'cd' * 32}" in printed.stdout


def test_components_and_digests_of_other_images_are_given_without_a_change_to_a_file():
    others = [f"chrislusf/seaweedfs@sha256:{'cd' * 32}", f"postgres=mirror.example:5000/pg@sha256:{'ef' * 32}"]

    for overlay in ("small", SINGLE_USER):
        printed = render(overlay, IMAGE, "downloads", "operator-elsewhere", *others)

        assert printed.returncode == 0, printed.stderr
        names = {item["metadata"]["name"] for item in yaml.safe_load_all(printed.stdout)}
        assert {"allow-steps-to-internet", "allow-operator"} <= names
        assert others[0] in printed.stdout and others[1].partition("=")[2] in printed.stdout
        assert "0" * 64 not in printed.stdout


@pytest.mark.parametrize("what", ["donwloads", "postgres:15", f"postgres@sha256:{'a' * 63}"])
def test_what_is_neither_a_component_nor_an_image_by_digest_is_refused(what):
    refused = render("small", IMAGE, what)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{what}: neither a component (" in refused.stderr and " downloads " in refused.stderr


@pytest.mark.parametrize("image", ["registry.example/infoxlm:latest", "infoxlm", f"infoxlm@sha256:{'a' * 63}"])
def test_an_image_without_digest_is_refused(image):
    refused = render("production", image)

    assert refused.returncode == 2 and "digest" in refused.stderr and refused.stdout == ""


def test_what_kubeflows_profile_controller_has_made_first_is_taken_over():
    """It makes kfp-launcher and artifact-repositories in a new Profile: a plain apply would stop at the conflict."""
    recipe = (ROOT / "Makefile").read_text().partition("\ndeploy:")[2].partition("\n\n")[0]

    assert "apply --server-side --force-conflicts -f -" in recipe


def test_an_overlay_that_is_not_there_is_refused():
    refused = render("huge", IMAGE)

    assert refused.returncode == 2 and "no such overlay" in refused.stderr
    assert {*OVERLAYS, SINGLE_USER} == {path.name for path in (K8S / "overlays").iterdir()}
