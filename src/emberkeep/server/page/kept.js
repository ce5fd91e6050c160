// Conversations are kept in this browser (IndexedDB): they survive a reload, and nobody else reads them.

import { merged, restored } from "./conversation.js";

const STORE = "conversations";

function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open("emberkeep", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** Resolves once it is written: a full disk is noticed only then. */
async function within(mode, action) {
  const database = await open();
  try {
    return await new Promise((resolve, reject) => {
      const transaction = database.transaction(STORE, mode);
      let result;
      transaction.oncomplete = () => resolve(result);
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
      action(transaction.objectStore(STORE), (value) => (result = value));
    });
  } finally {
    database.close();
  }
}

export async function allKept() {
  const found = await within("readonly", (store, tell) => {
    const asked = store.getAll();
    asked.onsuccess = () => tell(asked.result);
  });
  return found.map(restored).sort((a, b) => b.updated - a.updated);
}

export const keep = (conversation) =>
  within("readwrite", (store) => {
    const known = store.get(conversation.id);
    known.onsuccess = () => store.put(known.result ? merged(conversation, known.result) : conversation);
  });

export const drop = (id) => within("readwrite", (store) => store.delete(id));
