// Formats numbers for people.

const GROUPED = new Intl.NumberFormat("en-US");

export function count(value) {
  return value === null || value === undefined ? "–" : GROUPED.format(Math.round(value));
}

/** Formats a number with a few significant digits. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0) return `−${number(-value, digits)}`;
  const size = Math.abs(value);
  if (size >= 1e5) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return GROUPED.format(value);
  if (size >= 100) return value.toFixed(1);
  if (size >= 1) return value.toFixed(Math.max(0, digits - 1));
  if (size >= 1e-3) return value.toFixed(digits);
  return value.toExponential(1);
}

export function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 1) return `${seconds.toFixed(2)} s`;
  if (whole < 100) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

/** Formats a number of bytes. */
export function bytes(value) {
  if (value < 1e6) return `${(value / 1e3).toFixed(0)} kB`;
  return value < 1e9 ? `${(value / 1e6).toFixed(0)} MB` : `${(value / 1e9).toFixed(2)} GB`;
}

export function versions(oldest, newest) {
  if (oldest === null || oldest === undefined) return "–";
  return oldest === newest ? `v${newest}` : `v${oldest}–${newest}`;
}

/** Names the steps whose mean is a run's reward. */
export function lastSteps({ reward_steps }) {
  return reward_steps === 1 ? "last step" : `last ${reward_steps} steps`;
}

export function plural(amount, one, many = `${one}s`) {
  return `${count(amount)} ${amount === 1 ? one : many}`;
}
