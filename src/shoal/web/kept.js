// The files that a job has kept, each to download.

import { jobPath, maybe } from "./api.js";
import { bytes, h, moment, plural, whole } from "./dom.js";
import { now } from "./live.js";
import { replace } from "./patch.js";
import { saveFile } from "./save.js";
import { table } from "./table.js";

const SHOWN = 200;
const AGAIN_MS = 10_000; // a listing reads a folder of the head

export class KeptFiles {
  constructor(id) {
    this.id = id;
    this.at = -Infinity;
    this.problem = "";
    this.element = h("section", { class: "card", "aria-label": "Files", hidden: true });
  }

  async draw(job) {
    const over = Boolean(job.finished_ms);
    if (performance.now() - this.at < AGAIN_MS && over === this.over) return;
    this.at = performance.now();
    this.over = over;
    const found = await maybe(`${jobPath(this.id)}/files`);
    if (found) this.show(found);
  }

  show(found) {
    const { files, notes } = found;
    this.element.hidden = !files.length && !notes.length;
    const rows = files
      .slice(0, SHOWN)
      .map((file) =>
        h(
          "tr",
          { "data-key": file.path },
          h(
            "td",
            {},
            found.encrypted
              ? h("code", {}, file.path)
              : h("button", { class: "link", title: "Download", onclick: () => this.load(found, file) }, file.path),
          ),
          h("td", { class: "num" }, bytes(file.size)),
          h("td", { class: "num dim" }, moment(file.modified_ms, now())),
        ),
      );
    replace(
      this.element,
      h(
        "div",
        { class: "row" },
        h("h2", {}, "Files"),
        h("span", { class: "dim small" }, `${plural(files.length, "file")}, ${bytes(found.total_bytes)}`),
      ),
      found.encrypted
        ? h("p", { class: "dim small" }, "Encrypted. To decrypt them: ", h("code", {}, `shoal cp -r ${this.id}: .`))
        : null,
      this.problem ? h("p", { class: "problem", role: "alert" }, this.problem) : null,
      notes.map((note) => h("p", { class: "dim small" }, note)),
      files.length ? table(["File", "num:Size", "num:Changed"], rows) : null,
      files.length > SHOWN
        ? h("p", { class: "dim small" }, `and ${whole(files.length - SHOWN)} more: run shoal ls ${this.id}`)
        : null,
    );
  }

  async load(found, file) {
    this.problem = "";
    try {
      await saveFile(this.id, file);
    } catch (error) {
      this.problem = error.message;
    }
    this.show(found);
  }
}
