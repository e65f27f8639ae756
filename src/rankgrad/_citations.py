"""BibTeX of rankgrad and of the papers behind its losses, for model cards."""

SOFTWARE = """\
@software{rankgrad,
    title = {rankgrad: train retrieval models on the rank metric you report},
    author = {{The rankgrad maintainers}},
    license = {Apache-2.0}
}"""

RS_AT_K = """\
@inproceedings{patel2022recall,
    title = {Recall@k Surrogate Loss with Large Batches and Similarity Mixup},
    author = {Patel, Yash and Tolias, Giorgos and Matas, Ji{\\v{r}}{\\'\\i}},
    booktitle = {CVPR},
    year = {2022}
}"""

RAMBO = """\
@inproceedings{rolinek2020optimizing,
    title = {Optimizing Rank-Based Metrics with Blackbox Differentiation},
    author = {Rol{\\'\\i}nek, Michal and Musil, V{\\'\\i}t and Paulus, Anselm and Vlastelica, Marin and
              Michaelis, Claudio and Martius, Georg},
    booktitle = {CVPR},
    year = {2020}
}"""

FASTAP = """\
@inproceedings{cakir2019deep,
    title = {Deep Metric Learning to Rank},
    author = {Cakir, Fatih and He, Kun and Xia, Xide and Kulis, Brian and Sclaroff, Stan},
    booktitle = {CVPR},
    year = {2019}
}"""

SMOOTH_AP = """\
@inproceedings{brown2020smooth,
    title = {Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval},
    author = {Brown, Andrew and Xie, Weidi and Kalogeiton, Vicky and Zisserman, Andrew},
    booktitle = {ECCV},
    year = {2020}
}"""

# by the name of a loss on the command line, up to its first words
_BY_LOSS = {"recall-at-k": RS_AT_K, "rambo": RAMBO, "fastap": FASTAP, "smooth-ap": SMOOTH_AP}


def citations_of(loss: str = "", *, simix: bool = False) -> str:
    """The papers of a loss by its name on the command line, or all of them for a loss of any kind; rankgrad comes last."""
    papers = [paper for name, paper in _BY_LOSS.items() if loss.startswith(name)] if loss else [RS_AT_K, RAMBO, FASTAP]
    if simix and RS_AT_K not in papers:
        papers.append(RS_AT_K)
    return "\n".join([*papers, SOFTWARE])
