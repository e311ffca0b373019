#!lua
-- Takes all locks of a claim, or none. They share a slot.
-- KEYS: 1 the last token, 2 the mark of a request that was given up, 3.. the locks
-- ARGV: 1 owner (32 hex digits), 2 ttl in ms, 3 how long to keep the last token, in ms
-- Returns {1, token}, {0, ms until the holder expires} or {-1} for a request that was given up.
-- What a lock is, says acquire.lua.
local owner, ttl = ARGV[1], ARGV[2]
local values = redis.call('MGET', unpack(KEYS))
local first, mine, wait = nil, 0, nil
for i = 3, #KEYS do
  local held = values[i]
  if held then
    if string.sub(held, 1, 32) == owner then
      mine = mine + 1
      first = first or held
    else
      local left = redis.call('PTTL', KEYS[i])
      if not wait or left < 0 or (wait >= 0 and left > wait) then wait = left end
      if string.sub(held, -1) ~= '!' then
        redis.call('SET', KEYS[i], held .. '!', 'KEEPTTL')
      end
    end
  end
end
if wait then return {0, wait} end
if values[2] then return {-1} end
if mine > 0 and mine == #KEYS - 2 then
  -- the same request once more: its first answer was lost
  for i = 3, #KEYS do redis.call('PEXPIRE', KEYS[i], ttl) end
  return {1, string.match(first, ':(%d+)', 33)}
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token = now
local last = tonumber(values[1] or '0')
if last >= token then token = last + 1 end
local text = string.format('%.0f', token)
-- a token that is ahead of the clock is kept until the clock has caught up
local keep = ARGV[3] + math.ceil((token - now) / 1000)
redis.call('SET', KEYS[1], text, 'PX', string.format('%.0f', keep))
for i = 3, #KEYS do
  redis.call('SET', KEYS[i], owner .. ':' .. text, 'PX', ttl)
end
return {1, text}
