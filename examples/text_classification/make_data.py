"""Writes sentences labelled with one of six emotions. They are SYNTHETIC: built from templates for this example.

The file is a JSON list of [text, label id] pairs; `train.py` reads your own data in the same form. The task is difficult
on purpose: classes share words, a second clause outweighs the first ("虽然 ..., 但是 ..."), a negation reverses the
meaning, some sentences match two emotions, and 1 label in 20 is wrong. No model can reach an accuracy of 1 on it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LABELS = ["其他", "喜好", "悲伤", "厌恶", "愤怒", "高兴"]  # the position is the label id
NOISE = 0.05

TOPICS = (
    "这部电影|这家店|今天的天气|我们的老师|那首歌|这次考试|昨天的比赛|新来的同事|楼下的邻居|这件衣服|我的手机|早上的地铁|"
    "那本小说|妈妈做的饭|公司的食堂|这座城市|隔壁的小猫|周末的聚会|这个节目|他说的话"
)
OPENINGS = ["", "", "", "", "说实话，", "唉，", "哈哈，", "朋友们，", "今天才发现，", "怎么说呢，"]
ENDINGS = ["。", "。", "！", "", "，你们呢？", "，就这样吧。", "，真的。", "……"]

CLEAR = {
    "其他": "{}在三楼|请问{}几点开始|{}明天下午有安排|我把{}的情况记下来了|{}一共两个小时|听说{}换了时间|{}的照片在桌上",
    "喜好": "我很喜欢{}|{}真让人着迷|{}看一百遍都不够|我最爱的还是{}|{}太对我的胃口了|我要把{}推荐给大家|{}怎么看都好看",
    "悲伤": "想起{}我就难过|{}让我哭了很久|没有了{}，心里空空的|一提到{}，眼泪就掉下来|{}让我心碎|再也见不到{}了|{}叫人失望",
    "厌恶": "我讨厌{}|{}真恶心|再也不想看见{}|{}让人反胃|{}离我远一点|看到{}就烦|{}太难看了|我不喜欢{}|{}一点也不好",
    "愤怒": "{}气死我了|我要投诉{}|{}凭什么这样对我|{}太过分了，必须道歉|一说{}我就火大|{}简直是骗人|谁来管管{}",
    "高兴": "{}让我笑了一整天|因为{}，我开心得跳起来|{}带来了好消息，太棒了|{}真有意思|有{}，心情特别好|{}给了我一个惊喜",
}
NEGATED = "{}并不让我难过|我没有生{}的气|说不上讨厌{}|{}没什么好笑的|{}谈不上喜欢|{}不算过分"  # all of them 其他
UNCLEAR = {
    ("喜好", "高兴"): "{}真不错|{}太好了|又见到{}了",
    ("厌恶", "愤怒"): "{}真受不了|怎么又是{}|{}够了没有",
    ("悲伤", "愤怒"): "{}让我心里不舒服|{}为什么会这样",
    ("其他", "悲伤"): "{}也就这样了|{}已经过去了",
}


def sentence(draw: random.Random) -> tuple[str, str]:
    """A sentence and its emotion."""
    kind = draw.random()
    if kind < 0.12:
        emotions = draw.choice(list(UNCLEAR))
        text, emotion = clause(draw, UNCLEAR[emotions]), draw.choice(emotions)
    elif kind < 0.20:
        text, emotion = clause(draw, NEGATED), "其他"
    else:
        emotion = draw.choice(LABELS)
        text = clause(draw, CLEAR[emotion])
        if kind < 0.40:
            text = f"虽然{clause(draw, CLEAR[draw.choice(LABELS)])}，但是{text}"
    if draw.random() < NOISE:
        emotion = draw.choice([other for other in LABELS if other != emotion])
    return draw.choice(OPENINGS) + text + draw.choice(ENDINGS), emotion


def clause(draw: random.Random, templates: str) -> str:
    """One of the templates about one of the topics."""
    return draw.choice(templates.split("|")).format(draw.choice(TOPICS.split("|")))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("runs/text_classification/data/train.json"))
    parser.add_argument("--sentences", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    pairs = [sentence(draw) for _ in range(args.sentences)]
    args.to.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps([text, LABELS.index(emotion)], ensure_ascii=False) for text, emotion in pairs)
    args.to.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"wrote {len(pairs)} synthetic sentences to {args.to}, such as:")
    for emotion in LABELS:
        print(f"  {emotion}  {next(text for text, label in pairs if label == emotion)}")


if __name__ == "__main__":
    main()
