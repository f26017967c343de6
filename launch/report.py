"""Makes the page of a run, or of several beside each other: one HTML file, readable offline.

  python launch/report.py runs/quickstart                      # runs/quickstart/report.html
  python launch/report.py runs/a runs/b --out=compared.html

A run may still be going on, or have been stopped: the page shows what there is.
docs/report.md says how to read it.
"""

from absl import flags

from s3ac_jax.config.flags import run_app

_OUT = flags.DEFINE_string("out", None, "File to write; WORKDIR/report.html for a single run.")


def main(argv: list[str]) -> None:
    # Not above: a typo is told before matplotlib is loaded.
    from s3ac_jax.report.page import write_page

    print(write_page(argv[1:], _OUT.value))


if __name__ == "__main__":
    run_app(main, (), positional="the folder of a run, say runs/tiny")
