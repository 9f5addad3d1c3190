// Under each page that was found, show the text around the word that was typed. Without this the summary begins with
// the buttons at the top of the page, and words with an ending ("decay", "decays") are not found in it.
document.addEventListener("DOMContentLoaded", () => {
  const words = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().match(/[\w-]+/g) ?? [];

  Search.makeSearchSummary = (html) => {
    const page = new DOMParser().parseFromString(html.replaceAll("</", " </"), "text/html");
    const article = page.querySelector("article");
    article?.querySelectorAll(".headerlink, script, style").forEach((element) => element.remove());
    const text = (article?.textContent ?? "").replace(/\\[()[\]]/g, "").replace(/\s+/g, " ").trim();
    const places = words.map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
    const start = Math.max(Math.min(...places, text.length) - 100, 0);
    const summary = document.createElement("p");
    summary.className = "context";
    summary.textContent = (start ? "... " : "") + text.slice(start, start + 240) + " ...";
    return places.length ? summary : null;
  };
});
