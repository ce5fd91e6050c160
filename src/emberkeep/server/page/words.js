// Figures as people read them.

export const number = (value) => value.toLocaleString("en-US");
export const milliseconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** As in "3 min 12 s". */
export function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds) % 60} s`;
  return `${number(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

export function ago(seconds) {
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  const days = Math.round(seconds / 86400);
  return days === 1 ? "yesterday" : `${days} days ago`;
}

export function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = count > 0 ? Math.min(Math.floor(Math.log10(count) / 3), 4) : 0;
  const value = count / 1000 ** power;
  return `${value < 10 && power ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}
