// Two things the widgets expect of a page, which this site has in another form. Loaded just before the widgets.

// Their fonts, which they look for by a name that the site does not have.
require.config({
  paths: { "@jupyter-widgets/html-manager/dist": new URL("html-manager/dist", document.currentScript.src).href },
});

// MathJax 2, for formulas in labels. The site has MathJax 3, which is asked in another way.
window.addEventListener("load", () => {
  if (window.MathJax?.startup && !MathJax.Hub) {
    MathJax.Hub = {
      Queue: ([, , element]) => MathJax.startup.promise.then(() => MathJax.typesetPromise([element])),
    };
  }
});
