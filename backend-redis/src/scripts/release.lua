#!lua flags=allow-oom
-- Frees the locks of an owner. Runs on a server without free memory as well.
-- KEYS: 1 the mark of a request that was given up, 2.. the locks
-- ARGV: 1 owner, 2 how long the mark lasts in ms, 3 PUBLISH or SPUBLISH, 4 channel,
--       5.. for each lock what to publish
-- Returns how many of them the owner had.
local freed = 0
for i = 2, #KEYS do
  local held = redis.call('GET', KEYS[i])
  if held and string.sub(held, 1, 32) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    freed = freed + 1
    if string.sub(held, -1) == '!' then redis.call(ARGV[3], ARGV[4], ARGV[i + 3]) end
  end
end
if freed < #KEYS - 1 then
  -- its request may still be on the way, and must not take what nobody would free
  redis.call('SET', KEYS[1], '1', 'PX', ARGV[2])
end
return freed
