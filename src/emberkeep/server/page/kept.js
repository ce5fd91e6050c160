// Conversations are kept in this browser (IndexedDB): they survive a reload, and nobody else reads them.

const STORE = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open("emberkeep", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

async function within(mode, action) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const asked = action(database.transaction(STORE, mode).objectStore(STORE));
      asked.onsuccess = () => resolve(asked.result);
      asked.onerror = () => reject(asked.error);
    });
  } finally {
    database.close();
  }
}

export async function allKept() {
  const found = await within("readonly", (store) => store.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

export const keep = (conversation) => within("readwrite", (store) => store.put(conversation));
export const drop = (id) => within("readwrite", (store) => store.delete(id));
