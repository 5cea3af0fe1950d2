// Changes a part of the page into its successor and keeps the elements that are equal, so that the browser lays out and
// paints only what is new. The focus, open folds and scrolled tables stay.

/** Make the children of an element those of `fresh`, whose nodes are used up. */
export function morph(old, fresh) {
  const olds = [...old.childNodes], news = [...fresh.childNodes];
  let end = null; // before which nodes are added
  while (olds.length && news.length && olds[0].isEqualNode(news[0])) { olds.shift(); news.shift(); }
  while (olds.length && news.length && olds.at(-1).isEqualNode(news.at(-1))) { end = olds.pop(); news.pop(); }
  news.forEach((next, place) => {
    const former = olds[place];
    if (!former) old.insertBefore(next, end);
    else if (!isSuccessor(next, former)) former.replaceWith(next);
    else if (former.nodeType === Node.ELEMENT_NODE) morphElement(former, next);
    else former.data = next.data;
  });
  for (const former of olds.slice(news.length)) former.remove();
}

// A fold succeeds one with the same summary only, as the other may be closed.
function isSuccessor(next, former) {
  const findSummary = (node) => (node.nodeName === "DETAILS" ? node.firstElementChild?.textContent : "");
  return next.nodeName === former.nodeName && next.id === former.id && findSummary(next) === findSummary(former);
}

function morphElement(former, next) {
  const isOpen = former.open, isLater = former.dataset?.later && next.dataset?.later;
  const isLoaded = former.dataset?.asked === "done" || former.ariaBusy === "true";
  if (isLater && former.dataset.later === next.dataset.later) return; // it is what is loaded, or being loaded
  for (const { name } of [...former.attributes]) if (!next.hasAttribute(name)) former.removeAttribute(name);
  for (const { name, value } of next.attributes) if (former.getAttribute(name) !== value) former.setAttribute(name, value);
  if (former.nodeName === "DETAILS") former.open = isOpen;
  if (former.nodeName === "INPUT") Object.assign(former, { value: next.value, checked: next.checked });
  if (!isLater) morph(former, next);
  else if (isLoaded) former.ariaBusy = "true"; // what was loaded stays, pale, until its successor is
}
