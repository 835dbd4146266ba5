// The search of the site runs in a Worker, and browsers start none for pages that are opened from disk. There it runs
// in a hidden frame instead. The plugin `offline` would load the like of it from the network: the word iframe-worker in
// the name of this file tells it that there is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.document.open();
      this.inner.document.write("<body></body>");
      this.inner.document.close();
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.isLoaded = this.load(url);
    }

    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.inner.document.createElement("script");
        Object.assign(script, { src: url, onload: loaded, onerror: failed });
        this.inner.document.body.append(script);
      });
    }

    postMessage(data) {
      this.isLoaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
