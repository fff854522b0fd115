// Files for the reader's own disk: fetched in pieces and handed to the browser as one download.

import { get, jobPath } from "./api.js";

export const SAVED_BYTES_MAX = 512 * 1024 * 1024; // the browser holds all of it

export const bytesOf = (data) => Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));

export function save(name, parts) {
  const url = URL.createObjectURL(new Blob(parts, { type: "application/octet-stream" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A file that the job has kept. */
export async function saveFile(job, file) {
  if (file.size > SAVED_BYTES_MAX)
    throw new Error(`${file.path} is too large for the browser; run shoal cp ${job}:${file.path} .`);
  const base = `${jobPath(job)}/files/part?path=${encodeURIComponent(file.path)}`;
  const parts = [];
  let offset = 0;
  let version = null;
  for (;;) {
    const piece = await get(`${base}&offset=${offset}`);
    if (version !== null && piece.version !== version)
      throw new Error(`${file.path} changed while it was read; try again`);
    version = piece.version;
    const bytes = bytesOf(piece.data);
    parts.push(bytes);
    offset += bytes.length;
    if (!bytes.length || offset >= piece.size) break;
  }
  save(file.path.split("/").at(-1), parts);
}
