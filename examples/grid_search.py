"""scikit-learn on a cluster: a grid search whose fits run as tasks of `shoal.map`'s workers.

pip install 'shoal[tasks]' joblib scikit-learn
shoal up --nodes 2 --gpus 0
python examples/grid_search.py
"""

from __future__ import annotations

import joblib
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

import shoal.joblib
from shoal.tasks import Cluster

GRID = {"C": [0.1, 1, 10], "gamma": [1e-4, 1e-3, 1e-2]}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(), GRID, cv=3)
    shoal.joblib.register()
    with joblib.parallel_config("shoal", n_jobs=2, cluster=Cluster(cpus=1, name="grid-search")):
        search.fit(images, labels)
    print(f"best: {search.best_params_}, {search.best_score_:.3f} right")


if __name__ == "__main__":
    main()
