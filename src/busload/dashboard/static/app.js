// What pages do in the browser: live values, times of the reader's zone, copying, dialogs. Data becomes text, never HTML.
"use strict";

(() => {
  const ATTRIBUTES = new Set(["aria-label", "data-state", "width", "x"]);
  const feedState = document.getElementById("feed");
  let source = null;
  let shared = null;
  let shares = Boolean(window.SharedWorker);
  let followers = new Map();

  // -- times -----------------------------------------------------------------------------------------------------------

  const parts = { month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  const clock = new Intl.DateTimeFormat(undefined, parts);
  const calendar = new Intl.DateTimeFormat(undefined, { year: "numeric", ...parts });
  const year = new Date().getFullYear();

  function showTime(element) {
    const at = new Date(element.dateTime);
    if (!Number.isNaN(at.getTime())) element.textContent = (at.getFullYear() === year ? clock : calendar).format(at);
  }

  function showTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) showTime(element);
  }

  // A time that follows the stream, which sends ISO text, or nothing.
  function setTime(element, value) {
    if (value === element.dateTime) return;
    element.dateTime = value;
    element.title = value && `${value.slice(0, 19).replace("T", " ")} UTC`;
    element.textContent = "–";
    showTime(element);
  }

  // Times of filters: people see and choose those of their zone, and addresses hold those of UTC.
  function localTime(at) {
    return new Date(at.getTime() - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
  }

  function showMoments(root) {
    for (const mark of root.querySelectorAll("[data-utc]")) mark.remove();
    for (const input of root.querySelectorAll("input[data-at]")) input.value = localTime(new Date(input.dataset.at));
  }

  document.addEventListener("formdata", (event) => {
    for (const input of event.target.querySelectorAll("input[type=datetime-local]")) {
      const at = new Date(input.value);
      if (Number.isNaN(at.getTime())) continue;
      const kept = input.dataset.at && input.value === localTime(new Date(input.dataset.at));
      event.formData.set(input.name, kept ? input.dataset.at : at.toISOString());
    }
  });

  // -- live values -----------------------------------------------------------------------------------------------------

  function follow(key, show) {
    if (!followers.has(key)) followers.set(key, []);
    followers.get(key).push(show);
  }

  function findFollowers(root) {
    followers = new Map();
    for (const element of root.querySelectorAll("[data-live]")) {
      follow(element.dataset.live, (value) => {
        if (element.tagName === "TIME") setTime(element, value);
        else if (element.textContent !== value) element.textContent = value;
      });
    }
    for (const element of root.querySelectorAll("[data-live-attrs]")) {
      for (const pair of element.dataset.liveAttrs.split(" ")) {
        const colon = pair.indexOf(":");
        const name = pair.slice(0, colon);
        if (ATTRIBUTES.has(name)) follow(pair.slice(colon + 1), (value) => element.setAttribute(name, value));
      }
    }
    for (const part of root.querySelectorAll("[data-live-part]")) {
      follow(part.dataset.livePart, (value) => {
        part.dataset.wanted = value;
        renew(part);
      });
    }
  }

  // A part of the page that depends on a live value is read anew when it shows another one. A dialog that is open in it
  // stays, with what somebody has typed, until it is closed.
  function renew(part) {
    const value = part.dataset.wanted;
    if (value === undefined || part.querySelector("[data-shown]").dataset.shown === value) return;
    if (!part.querySelector("dialog[open]")) part.dispatchEvent(new CustomEvent("busload:changed"));
  }

  document.addEventListener("close", (event) => {
    const part = event.target.closest("[data-live-part]");
    if (part) renew(part);
  }, true);

  function showChanges(rows) {
    const shown = new Set([...document.querySelectorAll("[data-row]")].map((element) => element.dataset.row));
    const now = new Set(rows);
    let count = 0;
    for (const row of now) if (!shown.has(row)) count += 1;
    for (const row of shown) if (!now.has(row)) count += 1;
    const offer = document.getElementById("changes");
    offer.hidden = count === 0;
    offer.querySelector("button").textContent = count === 1 ? "Show 1 change" : `Show ${count} changes`;
  }

  const PAUSE = 5000; // milliseconds until a stream that was refused is asked for again
  const HERE = 15000; // milliseconds after which a window says again that it is there

  function showValues(values) {
    feedState.textContent = "live";
    feedState.dataset.state = "live";
    for (const [key, value] of Object.entries(values)) {
      if (key === "rows") showChanges(value);
      else if (key === "chart") document.dispatchEvent(new CustomEvent("busload:value", { detail: { key, value } }));
      else for (const show of followers.get(key) || []) show(String(value));
    }
  }

  function showStill(why) {
    feedState.textContent = `stands still: ${why}`;
    feedState.dataset.state = "still";
  }

  function show(opened, { name, data, closed }) {
    if (source !== opened) return;
    if (name === "values") showValues(data);
    else if (name === "trouble") showStill(data.message);
    else showStill("no connection");
    // Browsers come back by themselves after a broken connection, but never after an answer such as 502 of a proxy.
    if (closed) setTimeout(() => { if (source === opened) listen(document.getElementById("main")); }, PAUSE);
  }

  // The streams of all windows of a browser are held by one shared worker: see live.js.
  function openShared(address) {
    if (!shared) {
      const worker = new SharedWorker(document.body.dataset.liveWorker);
      worker.onerror = () => { shares = false; listen(document.getElementById("main")); };
      shared = worker.port;
    }
    const opened = { close: () => { clearInterval(opened.here); shared.postMessage(null); } };
    const follow = () => shared.postMessage(address);
    shared.onmessage = (event) => { if (event.data.address === address) show(opened, event.data); };
    opened.here = setInterval(follow, HERE);
    follow();
    return opened;
  }

  // Where there are no shared workers, as on some phones, a window holds its own stream.
  function openOwn(address) {
    const opened = new EventSource(address);
    for (const name of ["values", "trouble"]) {
      opened.addEventListener(name, (event) => show(opened, { name, data: JSON.parse(event.data) }));
    }
    opened.addEventListener("error", () => {
      show(opened, { name: "error", closed: opened.readyState === EventSource.CLOSED });
    });
    return opened;
  }

  // A page that nobody sees listens to nothing.
  function listen(main) {
    if (source) source.close();
    source = null;
    feedState.textContent = "";
    if (!main || !main.dataset.liveUrl || document.hidden) return;
    findFollowers(main);
    const address = new URL(main.dataset.liveUrl, window.location.href).href;
    source = (shares ? openShared : openOwn)(address);
  }

  // -- what people do --------------------------------------------------------------------------------------------------

  async function copy(button) {
    const text = document.getElementById(button.dataset.copy).textContent;
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy it";
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.copy) copy(button);
    else if (button.dataset.opens) document.getElementById(button.dataset.opens).showModal();
    else if ("closes" in button.dataset) button.closest("dialog").close();
    else if ("reload" in button.dataset) window.location.reload();
  });

  document.addEventListener("change", (event) => {
    if (!("ticks" in event.target.dataset)) return;
    for (const box of event.target.form.querySelectorAll("input[name=command]")) box.checked = event.target.checked;
  });

  document.addEventListener("change", async (event) => {
    const input = event.target;
    if (!input.dataset.into || !input.files.length) return;
    document.getElementById(input.dataset.into).value = await input.files[0].text();
  });

  // -- answers that are of no use -----------------------------------------------------------------------------------------

  const LOST =
    "No answer of the dashboard came back. It may be away, or you are signed out. What you asked for may have happened: " +
    "reload the page, and look before you repeat it.";

  // A part is asked for again after a while. People are told what became of their action, where they have sent it.
  function lose(asker) {
    if (asker.matches("[data-live-part]")) setTimeout(() => renew(asker), PAUSE);
    if (asker.matches(".why:empty")) asker.textContent = "No answer yet. It is asked for again.";
    const place = asker.closest("#diff, form");
    if (!place) return;
    const warning = document.createElement("p");
    Object.assign(warning, { className: "warning lost", role: "alert", tabIndex: -1, textContent: LOST });
    if (place.matches("form")) for (const before of place.querySelectorAll(".lost")) before.remove();
    else place.replaceChildren();
    place.append(warning);
    if (place === asker || asker.matches("button")) warning.focus();
  }

  // An answer is dropped if an action has replaced meanwhile what asked for it, or if somebody has opened a dialog in it.
  // One that lacks what was asked for is a page of trouble, a proxy's or another application's. htmx sends the events of
  // an element that is gone to the document: the target of an event says nothing about who has asked.
  document.addEventListener("htmx:before:swap", (event) => {
    const { ctx, tasks } = event.detail;
    const task = tasks.find((each) => each.type === "main");
    if (!task) return;
    const dialog = task.target.matches("[data-live-part]") && task.target.querySelector("dialog[open]");
    const gone = !task.target.isConnected;
    const useless = ctx.select ? !task.fragment.childElementCount : ctx.response.status >= 400;
    if (dialog || gone || useless) event.preventDefault();
    if (useless && !gone) lose(ctx.sourceElement);
  });

  document.addEventListener("htmx:error", (event) => lose(event.detail.ctx.sourceElement));

  // -- begin, and begin again with what an action has brought ------------------------------------------------------------

  function begin() {
    const main = document.getElementById("main");
    showTimes(document);
    showMoments(document);
    listen(main);
  }

  document.addEventListener("htmx:after:swap", (event) => {
    const part = event.target.closest && event.target.closest(".why, [data-part]");
    if (part) {
      showTimes(part);
      const end = part.querySelector("#notice");
      if (end) end.focus();
      return;
    }
    begin();
    (document.getElementById("notice") || document.getElementById("main")).focus();
  });
  const current = document.querySelector(".side [aria-current]");
  if (current) current.scrollIntoView({ block: "nearest", inline: "center" });  // on a phone it may be out of sight
  document.addEventListener("visibilitychange", () => listen(document.getElementById("main")));
  window.addEventListener("pagehide", () => { if (source) source.close(); });
  begin();
})();
