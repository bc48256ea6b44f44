// The charts of the overview: numbers over time as lines. Each has a sentence and a table beside it, which say the same.
"use strict";

(() => {
  const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
  const STYLES = ["solid", "dashed", "dotted", "double"];
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const LEGEND = 42; // pixels below a chart
  const charts = [];

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function time(seconds) {
    return clock.format(new Date(seconds * 1000));
  }

  function span(seconds) {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
    }
    return `${seconds < 10 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
  }

  function shown(unit, value) {
    if (value === null || value === undefined) return "–";
    if (unit === "time") return span(value);
    return value.toLocaleString(undefined, { maximumFractionDigits: value < 100 ? 1 : 0 }) + unit;
  }

  // What a line says below the chart: its number under the pointer, or its last one.
  function told(self, value, index, at, unit) {
    if (at !== null) return shown(unit, value);
    return shown(unit, self.data[index].findLast((each) => each !== null));
  }

  function options(element, lines, unit) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    return {
      width: element.clientWidth,
      height: element.clientHeight - LEGEND,
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      scales: { y: { range: (self, least, most) => [0, Math.max(most * 1.08, 1)] } },
      legend: { markers: { dash: (self, index) => STYLES[index - 1] } },
      axes: [{ ...axis, size: 24, gap: 4, values: (self, ticks) => ticks.map(time) }, { ...axis, size: 56, values: (self, ticks) => ticks.map((tick) => shown(unit, tick)) }],
      series: [
        { label: "at", value: (self, at) => (at === null ? "now" : time(at)) },
        ...lines.map((line, index) => ({
          label: line.label,
          stroke: colour(line.colour),
          width: 2,
          dash: DASHES[index],
          points: { show: false },
          value: (self, value, index, at) => told(self, value, index, at, unit),
        })),
      ],
    };
  }

  function columns(data, lines) {
    return [data.at, ...lines.map((line) => data[line.key])];
  }

  function make(element, data) {
    const lines = JSON.parse(element.dataset.lines);
    const chart = { element, lines, unit: element.dataset.unit, plot: null };
    chart.plot = new uPlot(options(element, lines, chart.unit), columns(data, lines), element);
    charts.push(chart);
    new ResizeObserver(() => chart.plot.setSize({ width: element.clientWidth, height: element.clientHeight - LEGEND })).observe(element);
  }

  function begin() {
    charts.length = 0;
    const section = document.querySelector("[data-charts]");
    if (!section) return;
    let data = JSON.parse(section.dataset.charts);
    for (const element of section.querySelectorAll(".chart")) make(element, data);
    document.addEventListener("busload:value", (event) => {
      if (event.detail.key !== "chart") return;
      data = JSON.parse(event.detail.value);
      for (const chart of charts) chart.plot.setData(columns(data, chart.lines));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of charts) {
        chart.plot.destroy();
        chart.plot = new uPlot(options(chart.element, chart.lines, chart.unit), columns(data, chart.lines), chart.element);
      }
    });
  }

  begin();
})();
