// Search without a server. A browser starts no Worker for a page that was opened from the disk (file://); the search then
// runs in a hidden frame of the page, behind the same interface. The theme looks for the name `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script src="${url}"></script>`
      // A frame's own postMessage would send the answer to the frame itself.
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve)).then(() => {
        const target = this.frame.contentWindow
        target.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        return target
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.loaded.then((target) => target.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
