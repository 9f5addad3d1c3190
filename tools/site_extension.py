"""What this book adds to the site generator: scripts served from the site, the notebook cache, a Kaggle button, and the
stages as files to copy.
"""

import notebook_cache
import web_assets


def configure(app, config):
    paths = web_assets.addresses()
    if web_assets.available():
        config.html_static_path.append(str(web_assets.FOLDER))
    config.mathjax_path = paths["mathjax"]
    config.nb_ipywidgets_js = {paths["requirejs"]: {}, "widgets.js": {}, paths["widgets"]: {}}  # loaded in this order
    config.nb_execution_cache_path = str(notebook_cache.cache_path())


def write_exports(app):
    """The page `copy` includes them."""
    # Only here: the package imports JAX, which a look at the settings alone has no need of.
    from gdn2_kernels import STAGES
    from gdn2_kernels.export import export

    folder = notebook_cache.ROOT / "_build" / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        (folder / f"gdn2_{stage}.py").write_text(export(stage))


def add_kaggle_button(app, page, template, context, doctree):
    """Next to the theme's Colab button, the same notebook on Kaggle."""
    if not page.startswith("notebooks/"):
        return
    options = app.config.html_theme_options
    file = f"{options['repository_url']}/blob/{options['repository_branch']}/{page}.ipynb"
    button = {
        "type": "link",
        "text": "Kaggle",
        "tooltip": "Launch on Kaggle",
        "url": f"https://kaggle.com/kernels/welcome?src={file}",
        "icon": "fab fa-kaggle",
        "label": "launch-kaggle-button",
    }
    for group in context["header_buttons"]:
        if group.get("label") == "launch-buttons":
            group["buttons"].append(button)


def remove_thebe(app, page, template, context, doctree):
    """The theme prepares every page for a service that this book does not use, and declares its constants twice."""
    context["script_files"] = [
        script for script in context["script_files"] if "thebe" not in f"{script} {getattr(script, 'attributes', '')}"
    ]


def add_search_script(app, page, template, context, doctree):
    if page == "search":
        app.add_js_file("search.js")


def setup(app):
    app.connect("config-inited", configure)
    app.connect("builder-inited", write_exports)
    app.connect("html-page-context", add_kaggle_button, priority=900)  # after the theme has made its buttons
    app.connect("html-page-context", add_search_script)
    app.connect("html-page-context", remove_thebe, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
