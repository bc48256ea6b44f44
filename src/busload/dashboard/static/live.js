// One for all windows of a browser: a shared worker that holds their streams. A browser opens six connections to a host
// for all windows together, and a stream holds one of them; the rest is for pages. So at most MOST streams are open.
// Windows that show the same page share one. If there are more pages than that, they take turns.
"use strict";

const MOST = 2;
const TURN = 1000; // milliseconds that a stream is open at least while another page waits for its turn
const SILENT = 45000; // milliseconds after which a window that has said nothing is gone, as one that has crashed

const pages = new Map(); // by the address of their streams: the windows that show a page, and its stream if it is open
const windows = new Map(); // by their ports: the address each follows, and when it has said so last

function tell(address, message) {
  for (const port of pages.get(address).ports) port.postMessage({ address, ...message });
}

function open(address, page) {
  const source = new EventSource(address);
  page.source = source;
  page.since = Date.now();
  page.answered = false;
  for (const name of ["values", "trouble"]) {
    source.addEventListener(name, (event) => {
      const data = JSON.parse(event.data);
      page.answered = true;
      if (name === "values") Object.assign(page.values, data);
      tell(address, { name, data });
    });
  }
  source.addEventListener("error", () => {
    page.answered = true;
    const closed = source.readyState === EventSource.CLOSED;
    if (closed) close(page);
    tell(address, { name: "error", closed });
    if (closed) drop(address);
  });
}

function close(page) {
  if (page.source) page.source.close();
  page.source = null;
  page.since = Date.now();
}

// A stream that was refused is asked for again by its windows, after a while.
function drop(address) {
  for (const port of [...pages.get(address).ports]) leave(port);
}

function leave(port) {
  const window = windows.get(port);
  if (!window) return;
  windows.delete(port);
  const page = pages.get(window.address);
  page.ports.delete(port);
  if (page.ports.size) return;
  close(page);
  pages.delete(window.address);
  share();
}

function follow(port, address) {
  const known = windows.get(port);
  if (known && known.address === address) {
    known.heard = Date.now();
    return;
  }
  leave(port);
  windows.set(port, { address, heard: Date.now() });
  let page = pages.get(address);
  if (page) {
    page.ports.add(port);
    if (Object.keys(page.values).length) port.postMessage({ address, name: "values", data: page.values });
    return;
  }
  page = { ports: new Set([port]), source: null, since: 0, answered: false, values: {} };
  pages.set(address, page);
  share();
}

// Whoever has waited longest gets the stream that has been open longest, once that has answered and had its turn.
function share() {
  const now = Date.now();
  const bySince = (one, other) => one[1].since - other[1].since;
  const waiting = [...pages].filter(([, page]) => !page.source).sort(bySince);
  const opened = [...pages].filter(([, page]) => page.source).sort(bySince);
  const over = opened.filter(([, page]) => page.answered && now - page.since >= TURN);
  let room = MOST - opened.length;
  for (const [address, page] of waiting) {
    if (room > 0) room -= 1;
    else if (over.length) close(over.shift()[1]);
    else break;
    open(address, page);
  }
}

setInterval(() => {
  const now = Date.now();
  for (const [port, window] of [...windows]) if (now - window.heard > SILENT) leave(port);
  share();
}, TURN);

self.addEventListener("connect", (event) => {
  const [port] = event.ports;
  port.onmessage = (message) => (message.data ? follow(port, message.data) : leave(port));
});
