// Every built page, light and dark, wide and phone: axe findings, page errors, requests to other
// hosts, horizontal overflow. Usage: node check.mjs <folder of the built book>
import { createServer } from "node:http";
import { readFile, readdir } from "node:fs/promises";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { extname, join, resolve } from "node:path";
import { chromium } from "playwright-core";

const root = resolve(process.argv[2] ?? "../../_build/html");
const browser_path = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser",
  "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
if (!browser_path) {
  console.error("No Chromium found: install it or set CHROMIUM to its path.");
  process.exit(2);
}
const axe = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css",
  ".svg": "image/svg+xml", ".png": "image/png", ".json": "application/json" };
const server = createServer(async (request, response) => {
  try {
    const path = join(root, decodeURIComponent(new URL(request.url, "http://x").pathname));
    const body = await readFile(path);
    response.writeHead(200, { "content-type": types[extname(path)] ?? "application/octet-stream" });
    response.end(body);
  } catch {
    response.writeHead(404).end();
  }
}).listen(0, "127.0.0.1");
await new Promise((done) => server.once("listening", done));
const base = `http://127.0.0.1:${server.address().port}`;

const entries = await readdir(join(root, "book"), { recursive: true });
const pages = entries.filter((name) => name.endsWith(".html")).sort();
const browser = await chromium.launch({ executablePath: browser_path,
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
let findings = 0;
const report = (page, text) => { findings += 1; console.log(`${page}: ${text}`); };

for (const colorScheme of ["light", "dark"]) {
  for (const width of [1280, 390]) {
    const context = await browser.newContext({ colorScheme, viewport: { width, height: 900 } });
    for (const name of pages) {
      const where = `${name} (${colorScheme}, ${width} px)`;
      const page = await context.newPage();
      page.on("pageerror", (error) => report(where, `page error: ${error.message}`));
      page.on("request", (request) => {
        if (!/^(http:\/\/127\.0\.0\.1|data:|blob:)/.test(request.url()))
          report(where, `asks another host: ${request.url()}`);
      });
      await page.goto(`${base}/book/${name}`, { waitUntil: "load" });
      await page.waitForTimeout(400);
      await page.addScriptTag({ path: axe });
      const result = await page.evaluate(() => axe.run(document, { preload: false }));
      for (const violation of result.violations)
        report(where, `${violation.id}: ${violation.help} (${violation.nodes.length}) `
          + violation.nodes[0].html.slice(0, 120));
      const overflow = await page.evaluate(() =>
        document.documentElement.scrollWidth - document.documentElement.clientWidth);
      if (overflow > 1) report(where, `scrolls sideways by ${overflow} px`);
      await page.close();
    }
    await context.close();
  }
}
await browser.close();
server.close();
console.log(`${pages.length} pages, 2 themes, 2 widths: ${findings} findings`);
process.exit(findings ? 1 : 0);
