// Names and landmarks that the theme leaves out, for screen readers.
document.addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll("button.search-button-field"))
    button.removeAttribute("aria-label"); // its text says "Search"
  for (const summary of document.querySelectorAll("nav summary")) {
    const link = summary.closest("li")?.querySelector("a");
    summary.setAttribute("aria-label", `Sections of ${link?.textContent.trim() ?? "this part"}`);
  }
  for (const logo of document.querySelectorAll(".navbar-brand.logo")) {
    if (logo.closest("nav, header")) continue;
    logo.parentElement.setAttribute("role", "navigation");
    logo.parentElement.setAttribute("aria-label", "Home");
  }
});
